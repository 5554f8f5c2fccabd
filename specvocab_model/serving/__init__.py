"""What serving engines load: their plugins, and the parts that those share."""
