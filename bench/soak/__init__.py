"""A long run of mixed load: ten tenants, slow and broken clients, and an upstream that comes and goes."""
