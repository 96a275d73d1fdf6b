"""Updates of a run made again, and where and why two runs part."""
