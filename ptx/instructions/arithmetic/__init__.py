"""Instructions from registers to registers, of each thread by itself."""
