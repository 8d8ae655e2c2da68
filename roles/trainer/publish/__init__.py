"""The upload process: from a snapshot to a published version. Imports roles.policy and the spool."""
