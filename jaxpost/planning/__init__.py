"""Plans of runs on hardware that is described, not present."""
