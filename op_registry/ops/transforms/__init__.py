"""Fourier transforms.

Law: all or nothing for each slice. A slice is a line, a block over several dimensions, or a frame of a short-time
transform. A signal with missing samples has no spectrum without a model of the signal.

    fft   discrete Fourier transforms, from which torch composes all of torch.fft
    stft  short-time transforms and their inverse
"""
