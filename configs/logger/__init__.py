"""Packaged configuration files."""
