"""The runtime that attachments and handles share: it makes and closes the monitor, process groups and lanes."""
