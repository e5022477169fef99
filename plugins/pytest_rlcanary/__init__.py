"""The pytest plugins of rlcanary. Each module is one entry point, so `-p no:rlcanary-tracker` switches one off."""
