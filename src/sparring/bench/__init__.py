"""Measuring Sparring on a machine of yours: `sparring bench …`."""
