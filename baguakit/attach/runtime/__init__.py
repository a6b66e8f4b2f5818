"""The runtime that attachments and handles share: monitor, process groups and lanes, from start to end."""
