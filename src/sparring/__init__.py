"""Sparring trains game bots from play: play → record → store → train → publish → play.

Importing this package is free: the client is `sparring.client`, the training core loads only when it is used.
"""

__version__ = "0.1.0"
