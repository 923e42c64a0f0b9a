"""The routes of CfgRouter, by what answers them."""
