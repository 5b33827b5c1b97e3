"""Engines: one folder each, one file a seam. `patching` says what a seam is."""
