"""What computing costs while it runs: energy, CPU, memory, GPU."""
