"""The dashboard: pages of runs in a browser, made from the same values as the reports, while the runs go on."""
