"""The console: pages for people, rendered on the server, on the services that the API uses."""
