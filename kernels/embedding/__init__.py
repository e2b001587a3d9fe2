"""Token embedding with vocabulary shards."""
