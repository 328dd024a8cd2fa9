"""Lines of the gold solution that the mutants of several trap files edit."""

VAR = "var = np.mean(centred * centred, axis=-1)"
Y = "y = gamma * x_hat + beta"
G = "    g = dy * gamma\n"
DX = "dx = rstd[..., None] * (g - mean_g - x_hat * mean_gx)"
STEP = "STEP = 6e-6"
