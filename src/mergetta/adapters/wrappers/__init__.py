"""Adapters around adapters: one concern each that any method may want."""
