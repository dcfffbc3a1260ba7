"""The parts of the server that `mixlab.deploy.serve` puts together. They need the extra `serve`."""
