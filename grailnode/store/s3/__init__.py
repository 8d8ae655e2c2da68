"""Reads and writes objects in S3 buckets with boto3. Imports protocol, roles.gather and roles.ports."""
