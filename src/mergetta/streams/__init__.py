"""What a device learns of its stream."""
