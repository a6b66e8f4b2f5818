"""Reports, timelines, scalars and losses of compression of an attachment."""
