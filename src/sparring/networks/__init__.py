"""Networks: layers and activations (`layers`, `activations`), networks of them with a head (`spec`), the policy made of
them (`policy`), their JAX form (`functions`)."""
