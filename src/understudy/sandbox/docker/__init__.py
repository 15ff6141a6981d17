"""Docker sandboxes: containers, controlled through the Docker API. Podman's compatible socket works too."""
