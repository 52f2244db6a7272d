"""Algorithms: each a short loop over `sample`, `update`, `publish` and `report`."""
