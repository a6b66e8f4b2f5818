"""Reports, timelines and scalars of an attachment."""
