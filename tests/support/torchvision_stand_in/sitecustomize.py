"""Python imports this at start if the folder is on PYTHONPATH: for the processes of an engine."""

import torchvision_stand_in

torchvision_stand_in.install()
