"""Run in a test's server before it starts: tiny models have heads smaller than any kernel's."""

from pion_server.attend import requests

vars(requests)["DIMS"] = (8, 16, 24, *requests.DIMS)
