"""Who is in the next step: the scheduler, and the pages and adapters it hands out."""
