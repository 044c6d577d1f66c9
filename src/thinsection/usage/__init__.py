"""What a run used of what it held, recorded and analysed."""
