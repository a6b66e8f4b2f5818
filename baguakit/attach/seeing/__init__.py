"""What an attachment tells of itself: reports, timelines, scalars, and what compression loses."""
