"""The plugin contract and how plugins are found and proved."""
