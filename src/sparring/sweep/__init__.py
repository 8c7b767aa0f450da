"""Sweeps: many trials of one experiment, with values drawn from a search space, run by Ray Tune. A trial is an ordinary
run; what a sweep knows beyond its trials' directories is in its journal. Ray is loaded in `trial` and `tuning` only."""
