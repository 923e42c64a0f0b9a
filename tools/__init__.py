"""Programs around this repository that are neither product nor tests."""
