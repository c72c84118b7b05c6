"""Servers that tests talk to: real ones (SeaweedFS, rclone) and one that misbehaves on demand (stub)."""
