"""Changes of the noise of a training, each named as the flag that is its strength, and used above 0.
`add(inputs, strength, normals)` gives the inputs of a batch that are noise (`data.inputs`), with its own, of
`normals(stream)` for latents."""
