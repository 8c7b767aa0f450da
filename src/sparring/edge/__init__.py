"""Policies leave for other machines: observations to calibrate with, and files compared with the policy they are of."""
