"""The viewer: a local web server that shows stores, and the JSON API that its page uses."""
