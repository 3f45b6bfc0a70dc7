"""What the learners of one run do together: one seam (`base.Exchange`), one file per pace."""
