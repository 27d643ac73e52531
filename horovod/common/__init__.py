"""What Horovod keeps apart from any framework: exceptions, and State without tensors."""
