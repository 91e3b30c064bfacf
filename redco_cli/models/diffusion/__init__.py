"""The models of a Stable Diffusion pipeline, 1.x and 2.x: the U-Net and the autoencoder of its latents.

In comes a `config.json` of diffusers (`UNet2DConditionModel`, `AutoencoderKL`). Out goes a model behind the interface
`plugin.model.Model`, whose parameters are those of a checkpoint of diffusers.

Start with `model`. `reading` makes a `config` of the settings and refuses what is not computed here, `unet` and
`autoencoder` are put together from `blocks`, and `naming` says which tensor of diffusers holds which parameter. Images
and latents are [batch, height, width, channels] throughout.
"""
