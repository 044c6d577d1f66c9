"""Resources that a run held and used, recorded and analysed."""
