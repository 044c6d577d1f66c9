"""The probes, one file each: a labelled set in, a `ProbeResult` out."""
