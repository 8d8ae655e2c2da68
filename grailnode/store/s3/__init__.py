"""Objects in an S3 bucket through boto3. Imports protocol and roles.ports."""
