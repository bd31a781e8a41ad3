"""A trained model in use: answers for images, early ones where they suffice, and files for other programs."""
