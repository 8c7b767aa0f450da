"""Networks: declarative layers and heads (`spec`), the policy made of them (`policy`), their JAX form (`functions`)."""
