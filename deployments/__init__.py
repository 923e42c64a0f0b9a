"""The Ray Serve application: an HTTP ingress, guided generators and encoders."""
