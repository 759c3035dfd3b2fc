"""How models of the FAT family scale: decoders with the length of the target, encoders with that of the source."""
