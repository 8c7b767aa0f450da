"""Amazon's APIs without its SDK: signatures, credentials, Kinesis, S3. (`sdk`: credentials by botocore's chain.)"""
