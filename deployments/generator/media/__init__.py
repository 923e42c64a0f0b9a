"""Images, audio and video of requests: fetched, decoded, and prepared for the model, in bounds."""
