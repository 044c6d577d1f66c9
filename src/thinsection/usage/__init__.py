"""Records and analyses the resources that a run requested and used."""
