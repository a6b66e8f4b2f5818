"""A slow network without root: `pacer` limits the sockets that `connections` finds to a rate as `rates` reads it."""
