"""Devices: how they are laid out and how arrays get onto them."""
