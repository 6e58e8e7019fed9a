"""The exported graph traced with its gradients into one flat graph of ATen operators."""
